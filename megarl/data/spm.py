"""Converts a SentencePiece `.model` to a fast tokenizer that gives the same ids.

Training, the exported checkpoint and every library that reads it then share one tokenizer. The conversion is exact
except for two quirks of `tokenizers`. Of two segmentations with equal score, a unigram model may choose another one
than SentencePiece ("b bb" for "bb b"). It would read a text such as `<0x41>` as the byte of that name, so the text is
cut after `<`, and no piece crosses this cut.
"""

import re
from pathlib import Path
from typing import Any

from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from megarl.data.charsmap import table_normalizer
from megarl.errors import UserError

SPACE = "\u2581"  # SentencePiece's symbol for a space
# the enumerations of sentencepiece_model.proto
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
UNIGRAM, BPE, CHAR = 1, 2, 4


def load_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """Read a SentencePiece model (unigram, bpe or char).

    Encoding adds the beginning-of-sequence token if the model has one. Raises UserError for a file that is not such a
    model or cannot be converted exactly.
    """
    model = sentencepiece_model_pb2.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError changes its module between versions
        raise UserError(f"{path} is not a SentencePiece model: {error}") from error
    table = _table(model, path)
    _check(model, table, path)

    pieces = [piece.piece for piece in model.pieces]
    special = {
        f"{role}_token": pieces[index]
        for role in ("bos", "eos", "pad", "unk")
        if (index := getattr(model.trainer_spec, f"{role}_id")) >= 0
    }
    fast = FastTokenizer(_bpe(model) if model.trainer_spec.model_type in (BPE, CHAR) else _unigram(model))
    fast.normalizer = _normalizer(model.normalizer_spec, table)
    cuts = sorted(map(re.escape, _pieces(model, USER_DEFINED)), key=len, reverse=True)
    if _pieces(model, BYTE) and (cuts or model.trainer_spec.model_type == UNIGRAM):
        cuts.append("<(?=0x[0-9A-F]{2}>)")
    if cuts:
        fast.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(cuts)), "isolated")
    fast.decoder = _decoder(model)
    fast.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in _pieces(model, UNKNOWN, CONTROL)]
    )
    if bos := special.get("bos_token"):
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, pieces.index(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **special)


def _pieces(model: Any, *kinds: int) -> list[str]:
    return [piece.piece for piece in model.pieces if piece.type in kinds]


def _table(model: Any, path: Path) -> normalizers.Normalizer:
    if not (table := model.normalizer_spec.precompiled_charsmap):
        return normalizers.Sequence([])
    try:
        return table_normalizer(table)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def _check(model: Any, table: normalizers.Normalizer, path: Path) -> None:
    if model.trainer_spec.model_type not in (UNIGRAM, BPE, CHAR):
        raise UserError(f"{path}: only SentencePiece models of type unigram, bpe and char are supported, not word")
    if _pieces(model, UNUSED) or model.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(
            f"{path}: unused pieces and treat_whitespace_as_suffix have no counterpart in a fast tokenizer; "
            "train the SentencePiece model without them"
        )
    if rewritten := [piece for piece in _pieces(model, USER_DEFINED) if table.normalize_str(piece) != piece]:
        raise UserError(
            f"{path}: its normalisation rewrites the user-defined symbols {rewritten}; "
            "train it with normalization_rule_name=identity"
        )


def _unigram(model: Any) -> models.Unigram:
    best = max(piece.score for piece in model.pieces if piece.type == NORMAL)
    vocab = [
        # a user-defined symbol always wins: SentencePiece gives it the same score
        (piece.piece, len(piece.piece.encode()) * best - 0.1 if piece.type == USER_DEFINED else piece.score)
        for piece in model.pieces
    ]
    return models.Unigram(vocab, unk_id=model.trainer_spec.unk_id, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: Any) -> models.BPE:
    """Convert the pieces to merges: SentencePiece merges the pair whose union has the best score.

    So every split of a piece is a merge with the rank of that piece.
    """
    ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
    normal = set(_pieces(model, NORMAL))
    by_score = sorted((piece for piece in model.pieces if piece.type == NORMAL), key=lambda piece: -piece.score)
    merges = [
        (left, right)
        for piece in by_score
        for cut in range(1, len(piece.piece))
        if (left := piece.piece[:cut]) in normal and (right := piece.piece[cut:]) in normal
    ]
    return models.BPE(
        ids,
        merges,
        unk_token=model.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
        ignore_merges=bool(_pieces(model, USER_DEFINED)),  # the pre-tokenizer cuts them out, and no merge leads to them
    )


def _normalizer(spec: Any, table: normalizers.Normalizer) -> normalizers.Normalizer:
    steps = [table]
    if spec.remove_extra_whitespaces:
        steps.append(normalizers.Replace(Regex(rf"\A +|[ {SPACE}]+\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE))
    return normalizers.Sequence(steps)


def _decoder(model: Any) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)

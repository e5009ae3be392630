"""Converts a SentencePiece `.model` to a fast tokenizer that gives the same ids.

Training, the exported checkpoint and every library that reads it then share one tokenizer. A model that cannot be
converted exactly is refused. Two quirks of `tokenizers` remain. Of two segmentations with equal score, a unigram model
may choose another one than SentencePiece ("b bb" for "bb b"). It would read a text such as `<0x41>` as the byte of that
name, so the text is cut after `<`, and no piece crosses this cut.

SentencePiece looks for user-defined symbols twice: in the text, which its normalisation changes only around them, and
in the result, in which blanks have become `SPACE`. A bpe or char model takes the longest symbol at each place there. To
a unigram model a symbol is a piece with a very good score.
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from sentencepiece.sentencepiece_model_pb2 import ModelProto, NormalizerSpec, TrainerSpec
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as FastTokenizer
from transformers import PreTrainedTokenizerFast

from megarl.data.charsmap import CUT, later_characters, table_normalizer
from megarl.platform.errors import UserError, placed

SPACE = "\u2581"  # SentencePiece's symbol for a space
PREFIX, FIRST, KEPT = (chr(0x10000 * plane + 0xFFFF) for plane in (9, 10, 11))
"""Stand-ins, which no text has: for the blank before a text, the blank that a user-defined symbol begins with, and its
other blanks."""
PROBES = ("3 apples", "it is 1234", " and", "two  blanks", "a\nb", "a ")
"""Converters of SentencePiece models differ on these texts."""
MOST_NAMED = 5  # pieces
Piece = ModelProto.SentencePiece


def load_sentencepiece(path: Path) -> PreTrainedTokenizerFast:
    """Read a SentencePiece model (unigram, bpe or char).

    Encoding adds the beginning-of-sequence token if the model has one. Raises UserError for a file that is not such a
    model or cannot be converted exactly.
    """
    model = ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's DecodeError changes its module between versions
        raise UserError(f"{path} is not a SentencePiece model: {error}") from error
    if not model.pieces:
        raise UserError(f"{path} is not a SentencePiece model: it has no pieces")
    table = _table(model, path)
    _check(model, table, path)

    pieces = [piece.piece for piece in model.pieces]
    special = {}
    for role in ("bos", "eos", "pad", "unk"):
        index = getattr(model.trainer_spec, f"{role}_id")
        if index >= 0:
            special[f"{role}_token"] = pieces[index]
    is_unigram = model.trainer_spec.model_type == TrainerSpec.UNIGRAM
    fast = FastTokenizer(_unigram(model) if is_unigram else _bpe(model, path))
    fast.normalizer = _normalizer(model, table)
    cuts = [] if is_unigram else _longest_first(_pieces(model, Piece.USER_DEFINED))
    if _pieces(model, Piece.BYTE) and (cuts or is_unigram):
        cuts.append("<(?=0x[0-9A-F]{2}>)")
    if cuts:
        fast.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(cuts)), "isolated")
    fast.decoder = _decoder(model)
    fast.add_special_tokens(
        [AddedToken(piece, special=True, normalized=False) for piece in _pieces(model, Piece.UNKNOWN, Piece.CONTROL)]
    )
    bos = special.get("bos_token")
    if bos:
        fast.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, pieces.index(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=fast, clean_up_tokenization_spaces=False, **special)


def first_difference(path: Path, found: Sequence[list[int]]) -> str:
    """Compare the ids of `PROBES` with those of the `sentencepiece` library, and describe the first difference.

    Empty if there is none, or if the file is not a SentencePiece model: other tokenizers use its name, too.
    """
    try:
        processor = SentencePieceProcessor(model_file=str(path))
    except (OSError, RuntimeError):
        return ""
    for text, ids in zip(PROBES, found, strict=True):
        expected = processor.encode(text)
        if ids != expected:
            return f"{text!r} becomes {ids}, in the sentencepiece library {expected}"
    return ""


def _pieces(model: ModelProto, *kinds: int) -> list[str]:
    return [piece.piece for piece in model.pieces if piece.type in kinds]


def _longest_first(symbols: list[str]) -> list[str]:
    """Return the symbols as regular expressions; joined by `|`, they find the longest symbol."""
    return list(map(re.escape, sorted(symbols, key=len, reverse=True)))


def _table(model: ModelProto, path: Path) -> normalizers.Normalizer:
    table = model.normalizer_spec.precompiled_charsmap
    if not table:
        return normalizers.Sequence([])
    with placed(f"{path}: "):
        return table_normalizer(table)


def _check(model: ModelProto, table: normalizers.Normalizer, path: Path) -> None:
    if model.trainer_spec.model_type not in (TrainerSpec.UNIGRAM, TrainerSpec.BPE, TrainerSpec.CHAR):
        raise UserError(f"{path}: only SentencePiece models of type unigram, bpe and char are supported, not word")
    if _pieces(model, Piece.UNUSED) or model.trainer_spec.treat_whitespace_as_suffix:
        raise UserError(
            f"{path}: unused pieces and treat_whitespace_as_suffix have no counterpart in a fast tokenizer; "
            "train the SentencePiece model without them"
        )
    rewritten = [piece for piece in _pieces(model, Piece.USER_DEFINED) if _is_rewritten(piece, model, table)]
    if rewritten:
        raise UserError(
            f"{path}: its normalisation rewrites the user-defined symbols {rewritten}; "
            "train it with normalization_rule_name=identity"
        )
    tied = _overlapping(model)
    if model.trainer_spec.model_type == TrainerSpec.UNIGRAM and tied:
        raise UserError(
            f"{path}: the user-defined symbols {tied} overlap, and which of them a unigram model takes depends on the "
            "rounding of scores; train it with model_type=bpe, or without these symbols"
        )
    halved = [symbol for symbol in _pieces(model, Piece.USER_DEFINED) if re.search(r"<0(?:x|\Z)", symbol)]
    if _pieces(model, Piece.BYTE) and halved:
        raise UserError(
            f"{path}: a fast tokenizer would confuse the user-defined symbols {halved} with bytes; train the "
            "SentencePiece model without them"
        )


def _is_rewritten(symbol: str, model: ModelProto, table: normalizers.Normalizer) -> bool:
    """Return whether the table rewrites a user-defined symbol, or its start together with what is before it."""
    later = later_characters(model.normalizer_spec.precompiled_charsmap)
    return symbol[0] in later or table.normalize_str(symbol) != symbol


def _overlapping(model: ModelProto) -> list[str]:
    """Return the user-defined symbols with a beginning or an end in common with the other side of a symbol."""
    symbols = _pieces(model, Piece.USER_DEFINED)
    if model.normalizer_spec.escape_whitespaces:  # no symbol with a blank is found in a text
        symbols = [symbol for symbol in symbols if " " not in symbol]
    starts = {symbol[:cut] for symbol in symbols for cut in range(1, len(symbol))}
    ends = {symbol[cut:] for symbol in symbols for cut in range(1, len(symbol))}

    def overlaps(symbol: str) -> bool:
        return any(symbol[:cut] in ends or symbol[-cut:] in starts for cut in range(1, len(symbol)))

    return [symbol for symbol in symbols if overlaps(symbol)]


def _unigram(model: ModelProto) -> models.Unigram:
    best = max(0.0, *(piece.score for piece in model.pieces if piece.type == Piece.NORMAL))

    def score(piece: Any) -> float:
        if piece.type == Piece.USER_DEFINED:  # SentencePiece prefers it to its parts
            return len(piece.piece.encode()) * best - 0.1
        return float(piece.score)

    vocab = [(piece.piece, score(piece)) for piece in model.pieces]
    return models.Unigram(vocab, unk_id=model.trainer_spec.unk_id, byte_fallback=model.trainer_spec.byte_fallback)


def _bpe(model: ModelProto, path: Path) -> models.BPE:
    """Convert the pieces to merges: SentencePiece merges the pair whose union has the best score.

    So every split of a piece is a merge with the rank of that piece. Merges of different pieces have different ranks.
    Raises UserError if equal scores matter, or if a model with user-defined symbols has pieces that merges miss.
    """
    ids = {piece.piece: index for index, piece in enumerate(model.pieces)}
    normal = set(_pieces(model, Piece.NORMAL))
    by_score = sorted((piece for piece in model.pieces if piece.type == Piece.NORMAL), key=lambda piece: -piece.score)
    splits = ((piece.piece[:cut], piece.piece[cut:]) for piece in by_score for cut in range(1, len(piece.piece)))
    merges = [(left, right) for left, right in splits if left in normal and right in normal]
    bpe = models.BPE(
        ids,
        merges,
        unk_token=model.trainer_spec.unk_piece,
        fuse_unk=True,
        byte_fallback=model.trainer_spec.byte_fallback,
    )
    apart = _ranked_otherwise(model, bpe, {left + right for left, right in merges})
    if apart:
        raise UserError(
            f"{path}: several of its pieces have the same score, and a fast tokenizer, which cannot rank them equally, "
            f"reads {apart!r} otherwise; give each a score of its own, or name a directory with tokenizer.json"
        )
    symbols = _pieces(model, Piece.USER_DEFINED)
    if symbols:
        any_symbol = re.compile("|".join(_longest_first(symbols)))
        lost = [piece for piece in normal if len(bpe.tokenize(piece)) > 1 and not any_symbol.search(piece)]
        if lost:
            raise UserError(
                f"{path}: its merges lead to other pieces than {sorted(lost)[:MOST_NAMED]}, which a fast tokenizer "
                "with user-defined symbols would find; remove these pieces, or name a directory with tokenizer.json"
            )
        bpe.ignore_merges = True  # the pre-tokenizer cuts the symbols out, and no merge leads to them
    return bpe


def _ranked_otherwise(model: ModelProto, bpe: models.BPE, merged: set[str]) -> str:
    """Return a text in which pieces of equal scores overlap, and which `bpe` reads unlike the library; '' if none.

    Of two merges with the same score the library takes the first in the text.
    """
    by_score = defaultdict[float, list[str]](list)
    for piece in model.pieces:
        if piece.piece in merged:
            by_score[piece.score].append(piece.piece)
    tied = [pieces for pieces in by_score.values() if len(pieces) > 1]
    if not tied:
        return ""
    plain = ModelProto.FromString(model.SerializeToString())
    plain.normalizer_spec.CopyFrom(
        NormalizerSpec(name="identity", add_dummy_prefix=False, remove_extra_whitespaces=False)
    )
    library = SentencePieceProcessor(model_proto=plain.SerializeToString())
    pairs = chain.from_iterable(product(pieces, repeat=2) for pieces in tied)
    for first, second in pairs:
        for text in _overlaps(first, second):
            if library.encode(text) != [token.id for token in bpe.tokenize(text)]:
                return text
    return ""


def _overlaps(first: str, second: str) -> list[str]:
    """Return the texts that begin with one piece and end with another, which may share characters."""
    cuts = [cut for cut in range(min(len(first), len(second))) if first.endswith(second[:cut])]
    return [first + second[cut:] for cut in cuts]


def _normalizer(model: ModelProto, table: normalizers.Normalizer) -> normalizers.Normalizer:
    """Write a text as SentencePiece does before it looks for pieces.

    The longest user-defined symbol at a place is a unit: the table rewrites no part of it, and no blanks vanish from it
    but those at its start after another blank. So its end is cut from what follows, and its blanks have stand-ins.
    """
    spec = model.normalizer_spec
    symbols = _pieces(model, Piece.USER_DEFINED)
    spaced = [symbol for symbol in symbols if " " in symbol and spec.remove_extra_whitespaces]
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(PREFIX)] if spec.add_dummy_prefix else []
    space = SPACE if spec.escape_whitespaces else " "
    is_cut = bool(spaced or (symbols and spec.precompiled_charsmap))
    if is_cut:
        steps.append(normalizers.Replace(Regex(rf"(?:{'|'.join(_longest_first(symbols))})\K"), CUT))
    for symbol in sorted(spaced, key=len, reverse=True):
        first = FIRST if symbol.startswith(" ") else symbol[0]
        steps.append(normalizers.Replace(symbol + CUT, first + symbol[1:].replace(" ", KEPT) + CUT))
    steps += [table, *[normalizers.Replace(CUT, "")] * is_cut]
    if spec.remove_extra_whitespaces:
        blanks = rf"{PREFIX}{FIRST}{KEPT} "
        steps.append(normalizers.Replace(Regex(rf"(?:\A|(?<=[{blanks}]))(?: |{FIRST}{KEPT}*)+"), ""))
        steps.append(normalizers.Replace(Regex(rf"[{blanks}{space}]+\z"), ""))
    steps.append(normalizers.Replace(Regex(f"[{PREFIX}{FIRST}{KEPT} ]"), space))
    return normalizers.Sequence(steps)


def _decoder(model: ModelProto) -> decoders.Decoder:
    steps: list[decoders.Decoder] = [decoders.Replace(SPACE, " ")]
    if model.trainer_spec.byte_fallback:
        steps.append(decoders.ByteFallback())
    steps.append(decoders.Fuse())
    if model.normalizer_spec.add_dummy_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    return decoders.Sequence(steps)

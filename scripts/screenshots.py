"""Take the screenshots of docs/images: a run on the console, its report, and its charts in MLflow.

    python scripts/screenshots.py --run RUN_DIR [--out docs/images] [-- megarl train CONFIG.yaml ...]

The command after `--` runs in a terminal of tmux, which is photographed in the middle of a step, and is then stopped.
Needs tmux and Chromium (apt-get install tmux chromium).
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from urllib.request import urlopen

from mlflow import MlflowClient
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from megarl.tracking.mlflow_place import database_of
from megarl.tracking.mlflow_store import glance
from megarl.tracking.run_id import RUN_ID_FILE, read_run_id

ROOT = Path(__file__).resolve().parent.parent
COLUMNS = 112
LINES = 40
SESSION = "megarl-screenshots"
DRAWN_MS = 60_000
"""Time that a page has to fetch its data and to draw its charts."""
MOMENT = r"step 3\d/.*\n +updating the actor +\d of"
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
PAGE = """\
<body style="margin: 16px; background: {background}; color: {foreground}">
<pre style="font: 14px/20px 'DejaVu Sans Mono', monospace">{code}</pre></body>"""


def main() -> None:
    """Take the screenshots that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, metavar="RUN_DIR", help="a finished run with MLflow")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    parser.add_argument("--moment", default=MOMENT, help="what the console shows when it is photographed, a pattern")
    parser.add_argument("command", nargs="*")
    options = parser.parse_args()
    missing = [name for name in ("tmux", "chromium") if shutil.which(name) is None]
    if missing:
        sys.exit(f"{', '.join(missing)} is not installed: apt-get install {' '.join(missing)}")
    photograph((options.run / "report.html").resolve().as_uri(), options.out / "report.png", height=1500)
    photograph_mlflow(options.run, options.out / "mlflow.png")
    if options.command:
        photograph_console(options.command, options.moment, options.out / "console.png")


def photograph(url: str, path: Path, *, width: int = 1400, height: int = 900) -> None:
    """Write what Chromium draws of a page, as PNG."""
    with tempfile.TemporaryDirectory() as profile:
        size = f"--window-size={width},{height}"
        subprocess.run(
            [
                *(str(shutil.which("chromium")), *FLAGS, f"--user-data-dir={profile}", size),
                *(f"--virtual-time-budget={DRAWN_MS}", f"--screenshot={path}", url),
            ],
            check=True,
            stderr=subprocess.DEVNULL,
        )
    print(path)


def photograph_mlflow(run_dir: Path, path: Path) -> None:
    """Write what MLflow's own pages show of a run."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    store = f"sqlite:///{database_of(run_dir)}"
    server = subprocess.Popen(
        [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store, "--port", str(port), "--workers", "1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health")
        run = MlflowClient(store).get_run(read_run_id(run_dir / RUN_ID_FILE)).info
        place = f"http://127.0.0.1:{port}/{glance(run.run_id, run.experiment_id)}&workflowType=machine_learning"
        photograph(place, path, width=1800, height=800)
    finally:
        os.killpg(server.pid, signal.SIGKILL)


def photograph_console(command: Sequence[str], moment: str, path: Path) -> None:
    """Run a command in a terminal, write its picture when it shows the pattern `moment`, and stop it."""
    started = f"cd {shlex.quote(str(Path.cwd()))} && clear && {shlex.join(command)}"
    _tmux("new-session", "-d", "-s", SESSION, "-x", str(COLUMNS), "-y", str(LINES), "bash", "-c", started)
    try:
        while not re.search(moment, _tmux("capture-pane", "-p", "-t", SESSION)):
            time.sleep(0.1)
        shown = _tmux("capture-pane", "-e", "-p", "-t", SESSION)
    finally:
        _tmux("kill-session", "-t", SESSION)
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(Text.from_ansi(shown.rstrip()))
    with tempfile.TemporaryDirectory() as directory:
        page = Path(directory) / "console.html"
        page.write_text(console.export_html(theme=MONOKAI, code_format=PAGE, inline_styles=True), encoding="utf-8")
        photograph(page.as_uri(), path, width=9 * COLUMNS, height=20 * shown.rstrip().count("\n") + 80)


def _tmux(*arguments: str) -> str:
    return subprocess.run(
        [str(shutil.which("tmux")), *arguments], check=True, capture_output=True, encoding="utf-8"
    ).stdout


def _wait_for(url: str) -> None:
    while True:
        try:
            urlopen(url).close()  # noqa: S310 - of this machine
        except OSError:
            time.sleep(0.5)
        else:
            return


if __name__ == "__main__":
    main()

"""Pages as a browser shows them."""

import shutil
import subprocess
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page: Path) -> tuple[str, list[str]]:
    """Return the document after its scripts have run, and the lines of the console."""
    assert BROWSER
    profile = page.parent / "profile"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    return shown.stdout, [line for line in shown.stderr.splitlines() if "CONSOLE" in line]

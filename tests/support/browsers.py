"""Pages as a browser shows them."""

import os
import shutil
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def browse(page: Path) -> tuple[str, list[str]]:
    """Return the document after its scripts have run, and the lines of the console."""
    assert BROWSER
    profile = page.parent / "profile"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--enable-logging=stderr", "--virtual-time-budget=60000", "--dump-dom", page.as_uri()]
    dom, console = page.parent / "dom.html", page.parent / "console.txt"
    # Files, because helpers of the browser may outlive it and would keep pipes open.
    with dom.open("wb") as stdout, console.open("wb") as stderr:
        browser = subprocess.Popen(command, stdout=stdout, stderr=stderr, start_new_session=True)
        try:
            assert browser.wait(timeout=200) == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(browser.pid, signal.SIGKILL)
    lines = console.read_text(encoding="utf-8", errors="replace").splitlines()
    return dom.read_text(encoding="utf-8"), [line for line in lines if "CONSOLE" in line]

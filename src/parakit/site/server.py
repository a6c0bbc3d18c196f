"""Build the documentation site, and serve it on this machine. A browser runs the planner only in a served page."""

from __future__ import annotations

import errno
import subprocess
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rich.console import Console

from parakit.config.errors import LaunchError
from parakit.config.files import ROOT
from parakit.formatting.terminal import say
from parakit.launch import Interrupted

HOST = "127.0.0.1"
LAST_PORT = 65535
SITE = ROOT / "site"
BUILD = ("tools/docs.sh",)


def serve_site(console: Console, port: int) -> int:
    """Build the site and serve it until Ctrl-C, and return 0. The port is taken before the site is built.

    Raises:
        LaunchError: Another program uses the port, or the site could not be built.
    """
    with _open_server(SITE, port) as server:
        say(console, "Building the site …")
        try:
            subprocess.run(BUILD, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        except subprocess.CalledProcessError:
            raise LaunchError(
                "The site could not be built (see above); 'make docs' builds it alone."
            ) from None
        return _serve_until_interrupted(server, console)


def serve_folder(folder: Path, console: Console, port: int) -> int:
    """Serve a folder of finished pages until Ctrl-C, and return 0.

    Raises:
        LaunchError: Another program uses the port.
    """
    with _open_server(folder, port) as server:
        return _serve_until_interrupted(server, console)


def _open_server(folder: Path, port: int) -> ThreadingHTTPServer:
    """Return a server of the folder that listens on a port of this machine.

    Raises:
        LaunchError: The port is used, or may not be used.
    """
    try:
        return ThreadingHTTPServer((HOST, port), partial(_QuietHandler, directory=str(folder)))
    except OSError as error:
        reason = "is in use" if error.errno == errno.EADDRINUSE else "cannot be used"
        other_port = port + 1 if port < LAST_PORT else port - 1
        raise LaunchError(
            f'Port {port} {reason}; choose another one: make serve ARGS="--port {other_port}".'
        ) from None


def _serve_until_interrupted(server: ThreadingHTTPServer, console: Console) -> int:
    """Print the address, and answer requests until Ctrl-C; return 0."""
    address = f"http://{HOST}:{server.server_address[1]}"
    say(
        console,
        f"The site is at {address}/index.html, the planner at {address}/planner/planner.html",
    )
    say(console, "Ctrl-C ends it.")
    try:
        server.serve_forever()
    except (KeyboardInterrupt, Interrupted):
        say(console, "Ended.")
    return 0


class _QuietHandler(SimpleHTTPRequestHandler):
    """Serves files without a line per request."""

    def log_message(self, format: str, *args: object) -> None:
        """Print no line for a request."""

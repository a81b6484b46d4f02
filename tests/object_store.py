"""An S3 server in a process of its own, behind a proxy in this process that adds faults."""

from __future__ import annotations

import os
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.request import Request, urlopen

ACCESS_KEY, SECRET_KEY = "AKIDOFTHESETESTS42", "a-secret-of-these-tests-0123456789"
_BLOCK = 1 << 16
# Errors as S3 words them. The first one quotes the key.
ERRORS = {
    "wrong key": (403, "InvalidAccessKeyId", f"The key {ACCESS_KEY} with {SECRET_KEY} does not exist"),
    "expired": (400, "ExpiredToken", "The provided token has expired."),
    "full": (400, "QuotaExceeded", "The quota of the bucket is exceeded"),
    "denied": (403, "AccessDenied", "Access Denied"),
}


class Proxy(socketserver.ThreadingTCPServer):
    """Forwards connections to the server, with the fault that `fault` names.

    Faults are ``""``, none; ``down``, connections are closed at once; ``cut``, they are closed
    within a file; ``held``, files are not forwarded until `fault` changes; or a name in `ERRORS`,
    the answer to all requests that write.
    """

    daemon_threads = True
    fault = ""
    writes = 0
    """Number of requests that write a file."""

    def __init__(self, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = port


class _Handler(socketserver.BaseRequestHandler):
    server: Proxy

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.upstream)) as upstream:
            answers = threading.Thread(target=self._answers, args=(upstream,), daemon=True)
            answers.start()
            while block := self.request.recv(_BLOCK):
                if not self._forward(block, upstream):
                    break
            with suppress(OSError):
                upstream.shutdown(socket.SHUT_RDWR)
            answers.join()

    def _answers(self, upstream: socket.socket) -> None:
        with suppress(OSError):
            while block := upstream.recv(_BLOCK):
                self.request.sendall(block)

    def _forward(self, block: bytes, upstream: socket.socket) -> bool:
        """Forward one block of a request; False if the connection ends."""
        server, is_file = self.server, re.match(rb"PUT /[^ ]*/files/", block) is not None
        server.writes += is_file
        if server.fault == "down":
            return False
        if server.fault == "cut" and is_file:
            upstream.sendall(block[: len(block) // 2])
            return False
        while server.fault == "held" and is_file:
            time.sleep(0.01)
        if server.fault in ERRORS and block.startswith(b"PUT"):
            status, code, message = ERRORS[server.fault]
            body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()
            head = f"HTTP/1.1 {status} Error\r\nContent-Type: application/xml\r\nContent-Length: {len(body)}\r\n"
            self.request.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)
            return False
        upstream.sendall(block)
        return True


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


@contextmanager
def object_store() -> Iterator[tuple[Proxy, dict[str, str]]]:
    """Start a server with an empty bucket ``bucket``; yield its proxy, and the environment
    variables of a client.
    """
    port = _free_port()
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], **quiet
    )
    try:
        for _ in range(600):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None, "the server ended"
            time.sleep(0.1)
        urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
        with Proxy(port) as proxy:
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            yield (
                proxy,
                {
                    "AWS_ACCESS_KEY_ID": ACCESS_KEY,
                    "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.server_address[1]}",
                    "AWS_DEFAULT_REGION": "us-east-1",
                    "AWS_CONFIG_FILE": os.devnull,
                    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
                    "AWS_MAX_ATTEMPTS": "1",
                },
            )
            proxy.shutdown()
    finally:
        process.kill()
        process.wait()

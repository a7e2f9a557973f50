"""Servers of models in a process of their own, on this machine's own network."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

SECONDS = 480  # vLLM took more than 240 to start on two cores that seven processes shared


def answer(port, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        return json.load(response)


@contextmanager
def running(command, log, environment):
    """Start the command, whose last argument will be a free port; yield that once /health answers, and stop it at the end
    with all that it started."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {"stderr": subprocess.STDOUT, "env": environment, "start_new_session": True}
    with log.open("w") as output:
        process = subprocess.Popen([*command, str(port)], stdout=output, **options)
    try:
        until = time.monotonic() + SECONDS
        while not _is_healthy(port):
            assert process.poll() is None and time.monotonic() < until, log.read_text()
            time.sleep(0.5)
        yield port
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _is_healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=SECONDS):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False

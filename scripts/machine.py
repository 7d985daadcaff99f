"""What this machine offers: GPUs, free ports, a certificate."""

from __future__ import annotations

import errno
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from shutil import which

NVIDIA_SMI_TIMEOUT_S = 20.0
CERTIFICATE_DAYS = 825
MAX_PORT = 65_535


class StartError(Exception):
    """A start that cannot succeed; the text says why and what to do."""


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Return the names by which CUDA knows the GPUs that this service may use.

    `CUDA_VISIBLE_DEVICES` decides if it is set (empty or -1: none), else the driver is asked.
    """
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        names = [name.strip() for name in chosen.split(",") if name.strip()]
        # CUDA itself stops at the first invalid entry.
        return names[: names.index("-1")] if "-1" in names else names
    program = which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run(
            [program, "--query-gpu=index", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise StartError(
            f"nvidia-smi is installed but fails ({error}); mend the driver, "
            'or set CUDA_VISIBLE_DEVICES="" to start without GPU'
        ) from error
    return [line.strip() for line in done.stdout.splitlines() if line.strip()]


def check_port_is_free(host: str, port: int, remedy: str) -> None:
    """Raises StartError when nobody can listen on the port; `remedy` says what to do then."""
    if port > MAX_PORT:
        raise StartError(f"there is no port {port}; {remedy}")
    with socket.socket(_family(host), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartError(f"port {port} is in use; {remedy}") from error
            raise StartError(f"cannot listen on {host}:{port}: {error.strerror}") from error


def pick_free_port(host: str) -> int:
    with socket.create_server((host, 0), family=_family(host)) as probe:
        port: int = probe.getsockname()[1]
    return port


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def ensure_certificate(directory: Path) -> tuple[Path, Path]:
    """Return certificate and key under `directory`, self-signed and made here if absent.

    Raises:
        StartError: only one of the two is there, or openssl is missing or fails.
    """
    certificate, key = directory / "cert.pem", directory / "key.pem"
    if certificate.exists() and key.exists():
        return certificate, key
    if certificate.exists() or key.exists():
        raise StartError(f"{directory} holds only one of cert.pem and key.pem; add the other")
    program = which("openssl")
    if program is None:
        raise StartError(
            "HTTPS needs a certificate and openssl is not installed to make one: install "
            f"openssl, or put cert.pem and key.pem into {directory}, or say --http"
        )
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    names = ["DNS:localhost", f"DNS:{socket.gethostname()}", "IP:127.0.0.1"]
    address = outward_address()
    if address is not None:
        names.append(f"IP:{address}")
    options = ["-newkey", "rsa:2048", "-nodes", "-days", str(CERTIFICATE_DAYS)]
    subject = ["-subj", "/CN=omni-duplex-server", "-addext", f"subjectAltName={','.join(names)}"]
    half_made = directory / "cert.pem.part"
    done = subprocess.run(
        [program, "req", "-x509", *options, *subject, "-keyout", str(key), "-out", str(half_made)],
        capture_output=True,
        text=True,
        umask=0o077,
        check=False,
    )
    if done.returncode:
        key.unlink(missing_ok=True)
        raise StartError(f"openssl could not make a certificate: {done.stderr.strip()}")
    half_made.replace(certificate)
    return certificate, key


def outward_address() -> str | None:
    """The address under which other machines reach this one; None without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it only asks the routing table.
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return None
        address: str = probe.getsockname()[0]
        return address


def fetch(url: str, timeout_s: float) -> bytes | None:
    """Return what a loopback URL answers, whatever its status; None for no answer."""
    # Our own certificate on loopback needs no check, and proxies are not for loopback. A default
    # context would load the system's authorities each time.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=timeout_s) as reply:
            body: bytes = reply.read()
            return body
    except urllib.error.HTTPError as error:
        # A failed worker answers 503 and says in the body what has failed.
        return error.read()
    except (OSError, ValueError):
        return None

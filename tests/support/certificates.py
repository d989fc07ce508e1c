"""Certificates made for a test, by openssl."""

import ssl
import subprocess
from pathlib import Path
from typing import NamedTuple

_CURVE = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256")
_SUBJECT = ("-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")


class Certificate(NamedTuple):
    """Signed by itself, for localhost and 127.0.0.1."""

    cert: str
    key: str

    def server(self, *, asks_clients: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=self.cert)
        context.load_cert_chain(self.cert, self.key)
        context.verify_mode = ssl.CERT_REQUIRED if asks_clients else ssl.CERT_NONE
        return context

    def client(self, *, shows_own: bool = False) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self.cert)
        if shows_own:
            context.load_cert_chain(self.cert, self.key)
        return context


def self_signed(folder: Path) -> Certificate:
    made = Certificate(str(folder / "cert.pem"), str(folder / "key.pem"))
    files = ("-keyout", made.key, "-out", made.cert)
    subprocess.run(
        ["openssl", "req", "-x509", "-nodes", "-days", "2", *_CURVE, *_SUBJECT, *files], check=True, capture_output=True
    )
    return made

"""Certificates for a test, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

_EC = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")


def openssl(*arguments: object) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not here to make a certificate")
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def self_signed(folder: Path, names: str, *, encrypt: bool = False) -> tuple[Path, Path]:
    """Certificate and key of a server with these names: "DNS:localhost,IP:127.0.0.1"."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    secret = ("-passout", "pass:sesame") if encrypt else ("-nodes",)
    made = ("-keyout", key, "-out", certificate, "-days", "2", "-subj", "/CN=test")
    openssl("req", "-x509", *_EC, *secret, *made, "-addext", f"subjectAltName={names}")
    return certificate, key


def issued(folder: Path, names: str) -> tuple[Path, Path, Path]:
    """Certificate and key of a server, and the certificate of who issued it."""
    folder.mkdir(exist_ok=True)
    issuer, issuer_key = folder / "issuer.pem", folder / "issuer-key.pem"
    openssl(
        *("req", "-x509", *_EC, "-nodes", "-keyout", issuer_key, "-out", issuer, "-days", "2"),
        *("-subj", "/CN=issuer", "-addext", "keyUsage=critical,keyCertSign,cRLSign"),
    )
    certificate, key, wish = folder / "cert.pem", folder / "key.pem", folder / "wish.pem"
    openssl("req", "-new", *_EC, "-nodes", "-keyout", key, "-out", wish, "-subj", "/CN=test")
    extensions = folder / "extensions"
    extensions.write_text(
        f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nbasicConstraints=CA:FALSE\n"
    )
    openssl(
        *("x509", "-req", "-in", wish, "-CA", issuer, "-CAkey", issuer_key, "-CAcreateserial"),
        *("-out", certificate, "-days", "2", "-extfile", extensions),
    )
    return certificate, key, issuer

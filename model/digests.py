"""SHA-256 in hex: of files, and of sequences of parts."""

import hashlib
from pathlib import Path


def of_file(path: Path) -> str:
    """Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def of_parts(*parts: str | bytes | Path) -> str:
    """Of strings, bytes and files' contents; boundaries between the parts matter."""
    joined = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else part
        own = content.encode() if isinstance(content, str) else content
        joined.update(hashlib.sha256(own).digest())
    return joined.hexdigest()

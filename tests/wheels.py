"""Tiny wheels, as a build backend writes them: with a RECORD that states every file's hash and size."""

import base64
import zipfile
from hashlib import sha256
from pathlib import Path


def write_wheel(folder: Path, name: str, files: dict[str, str], version: str = "1.0") -> str:
    """A pure wheel in `folder`; returns its line of a hashed lock."""
    folder.mkdir(exist_ok=True)
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{path},{_hash(text)},{len(text.encode())}\n" for path, text in files.items())
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)
        packed.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    return f"{name}=={version} --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n"


def _hash(text: str) -> str:
    return "sha256=" + base64.urlsafe_b64encode(sha256(text.encode()).digest()).rstrip(b"=").decode()

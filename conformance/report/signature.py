"""Checks detached signatures of certificates, which minisign makes: who has made a certificate.

`minisign -Sm certificate.json` leaves `certificate.json.minisig` beside the certificate. The digest
that a certificate holds shows damage alone: who edits a certificate can write another digest.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

SUFFIX = ".minisig"
EXTRA = "pip install 'c10d-conformance[signed]'"


class NotSigned(Exception):
    """There is no signature of this file by this key; the message says why."""


class NoKey(ValueError):
    """This is no public key of minisign, or the package that would read it is missing."""


def trusted_comment(path: Path, key: str) -> str:
    """What the signer has said of the file, usually when it was signed.

    key: a public key of minisign: its file, or the line of it. Raises NotSigned, NoKey or OSError.
    """
    if importlib.util.find_spec("minisign") is None:
        raise NoKey(f"signatures are checked by the package py-minisign: {EXTRA}")
    import minisign

    try:
        is_file = Path(key).is_file()
        public = (minisign.PublicKey.from_file if is_file else minisign.PublicKey.from_base64)(key)
    except ValueError as error:
        raise NoKey(f"{key!r} is neither the file nor the line of a public key: {error}") from error
    beside = path.with_name(path.name + SUFFIX)
    if not beside.exists():
        raise NotSigned(f"there is no {beside.name} beside it")
    try:
        signature = minisign.Signature.from_file(beside)
        public.verify(path.read_bytes(), signature)
    except ValueError as error:
        raise NotSigned(f"{beside.name}: {error}") from error
    comment: str = signature.trusted_comment
    return comment

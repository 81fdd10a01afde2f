"""Files that change are read again, without a restart."""

import logging

from extproc.config import CertificateFiles
from extproc.tls.certificates import CertificateError, Certificates, read
from extproc.watched_file import Stamp, stamp

logger = logging.getLogger(__name__)


class Renewed:
    """What is in the files of a configuration that has TLS.

    Files that cannot be used change nothing: those before them stay.
    """

    def __init__(self, files: CertificateFiles, section: str, peers: str) -> None:
        """Reads them. Messages name the section of the configuration, and the peers that connect.

        Raises:
            CertificateError: a file cannot be used; the message names it.
        """
        self._files = files
        self._section = section
        self._peers = peers
        self._stamps = _stamps(files)
        self._problem = ""
        self.first = read(files, section)
        """What was in them then."""
        self._warn(self.first)

    def news(self) -> Certificates | None:
        """What is in them, if that changed and can be used; to be asked before each handshake."""
        stamps = _stamps(self._files)
        if stamps == self._stamps:
            return None
        try:
            certificates = read(self._files, self._section)
        except CertificateError as error:
            if str(error) != self._problem:
                logger.error("the old certificate stays in use", extra={"error": str(error)})
            self._problem = str(error)
            return None
        # Only now: files that could not be read are tried again, though they change no more.
        self._stamps, self._problem = stamps, ""
        logger.info("certificate renewed", extra={"file": str(self._files.tls_cert)})
        self._warn(certificates)
        return certificates

    def _warn(self, files: Certificates) -> None:
        if files.doubt:
            text = f"{self._peers} will not trust this certificate"
            logger.warning(text, extra={"reason": files.doubt})


def _stamps(files: CertificateFiles) -> list[Stamp | None]:
    """Differ when a file was replaced or written to."""
    return [
        None if path is None else stamp(path)
        for path in (files.tls_cert, files.tls_key, files.client_ca)
    ]

"""Distinguishes OSErrors of the operating system from OSErrors that programs raise."""

from __future__ import annotations


def is_from_system(error: Exception) -> bool:
    """Whether an exception may be handled as the failure of a file or process operation.

    True for every exception that is not an OSError.

    A program may limit the time of a call by a signal handler that raises TimeoutError, an OSError,
    at any point of the call. Such exceptions, and OSErrors of other packages, have no errno.
    Without an errno, only a plain OSError (raised by dlopen()) or an exception class of
    shutil (which collects several errors) counts as the system's.
    """
    if not isinstance(error, OSError):
        return True
    if error.errno is None:
        return type(error) is OSError or type(error).__module__ == "shutil"
    return not isinstance(error, TimeoutError) or error.filename is not None

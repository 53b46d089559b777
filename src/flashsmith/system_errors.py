"""Which OSErrors are the operating system's, and not the program's own."""

from __future__ import annotations


def is_from_system(error: Exception) -> bool:
    """Whether an exception may be caught as an error of a file or a process; True for exceptions
    that are no OSErrors.

    Programs limit the time of a call by a signal handler that raises TimeoutError, an OSError,
    wherever the call is just then. Such exceptions, and OSErrors of other packages, have no error
    number. OSErrors without one are the system's only as their own class, as dlopen() has them, or
    as shutil's, which lists several.
    """
    if not isinstance(error, OSError):
        return True
    if error.errno is None:
        return type(error) is OSError or type(error).__module__ == "shutil"
    return not isinstance(error, TimeoutError) or error.filename is not None

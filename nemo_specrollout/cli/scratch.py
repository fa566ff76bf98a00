# SPDX-License-Identifier: Apache-2.0
"""One folder for all temporary files of a command and its child processes, gone when it ends."""

import getpass
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def scratch_folder() -> Iterator[None]:
    """While entered, temporary files of this process, and of those that it starts, are in a new folder; then it is removed.

    vLLM leaves a file for each engine, Ray a folder for each run.
    """
    usual, named = tempfile.gettempdir(), os.environ.get("TMPDIR")
    # What is compiled stays, for the next run.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.path.join(usual, f"torchinductor_{getpass.getuser()}"))
    folder = tempfile.mkdtemp(prefix="specrollout-")
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = None
        if named is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = named
        shutil.rmtree(folder, ignore_errors=True)

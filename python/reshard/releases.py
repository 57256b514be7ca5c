# SPDX-License-Identifier: Apache-2.0
"""The releases of frameworks with which reshard is tested."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

from .errors import Error

#: The environment variable that permits releases with which reshard was not tested.
ANY_VERSION = "RESHARD_ANY_VERSION"


def installed(*packages: str) -> str:
    """Returns the release of the first of these packages that is installed, without the suffix of a build ("+cpu").

    Raises Error if none is installed.
    """
    for package in packages:
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    raise Error(f"found no installed package {' or '.join(packages)}, expected one")


def check_release(packages: tuple[str, ...], tested: tuple[str, ...]) -> None:
    """Checks the installed release of a framework, whose package may have several names.

    Raises Error if the release is not one of ``tested``, unless RESHARD_ANY_VERSION is set, and if no package is
    installed.
    """
    found = installed(*packages)
    if found not in tested and not os.environ.get(ANY_VERSION):
        raise Error(
            f"{packages[0]}: found release {found}, expected {' or '.join(tested)}, with which reshard is tested; "
            f"{ANY_VERSION}=1 permits others"
        )

# SPDX-License-Identifier: Apache-2.0
"""Settles how Ray starts for a run of several engines, when this module is imported.

Ray then listens on the loopback interface, and refuses processes without the run's token, which child processes inherit. Ray
reads these settings when it is imported, and vLLM imports Ray. So this module must be imported before both.
"""

import os
import secrets
import sys

if "ray" not in sys.modules:  # a program that has imported Ray has made its own choice
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    # This is Ray's switch for systems whose firewalls ask about each listener. Without it, Ray listens on all addresses.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

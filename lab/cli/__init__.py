# SPDX-License-Identifier: Apache-2.0
"""One short file for each command of the lab."""

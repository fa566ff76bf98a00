# SPDX-License-Identifier: Apache-2.0
"""The commands of the lab, with a short file for each."""

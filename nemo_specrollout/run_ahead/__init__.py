# SPDX-License-Identifier: Apache-2.0
"""The texts of the next step, made early while an engine waits, and samples that are of one policy although weights change."""

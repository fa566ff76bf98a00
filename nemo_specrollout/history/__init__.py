# SPDX-License-Identifier: Apache-2.0
"""Finished responses by their prompts, which all engines of a run share and which its next start finds again."""

# SPDX-License-Identifier: Apache-2.0
"""The history of finished responses by prompt, which all engines of a run share and which its next start finds again."""

# SPDX-License-Identifier: Apache-2.0
"""Decides how deep a drafter with weights drafts in an engine step, how many drafts are verified, and when drafters rest."""

# SPDX-License-Identifier: Apache-2.0
"""Audits of a run: are the recorded rows what the policy samples? Nothing here uses vLLM or the code that made the rows."""

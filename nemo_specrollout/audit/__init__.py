# SPDX-License-Identifier: Apache-2.0
"""Audits whether the recorded rows of a run are what the policy samples, without vLLM and the code that made the rows."""

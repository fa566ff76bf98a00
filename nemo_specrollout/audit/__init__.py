# SPDX-License-Identifier: Apache-2.0
"""Audits whether a run's recorded rows are what the policy samples. It needs neither vLLM nor the code that made the rows."""

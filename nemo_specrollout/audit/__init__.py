# SPDX-License-Identifier: Apache-2.0
"""Audits a run, which means it checks whether the policy would sample exactly the responses that the run has recorded.

A row is one recorded sample, with its prompt and response. The audit computes the tokens of rows again with transformers. So
it needs neither vLLM nor the code with which the run generated the rows.
"""

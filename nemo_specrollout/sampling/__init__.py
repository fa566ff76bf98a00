# SPDX-License-Identifier: Apache-2.0
"""Defines which tokens a request gets, by the seeds of requests and the rule by which draft tokens are accepted."""

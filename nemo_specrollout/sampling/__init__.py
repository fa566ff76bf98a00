# SPDX-License-Identifier: Apache-2.0
"""Defines which token is correct, by the seeds of requests and the acceptance of drafts by equality."""

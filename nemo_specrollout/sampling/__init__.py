# SPDX-License-Identifier: Apache-2.0
"""Defines which token is correct: request seeds and acceptance of drafts by equality."""

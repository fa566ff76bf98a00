# SPDX-License-Identifier: Apache-2.0
"""The tail policy, which decides where requests start, which of them move and which are raced, and its forecasts."""

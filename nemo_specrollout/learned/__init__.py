# SPDX-License-Identifier: Apache-2.0
"""What engines and drivers know from earlier starts, with learned state as plain numbers, and its file."""

# SPDX-License-Identifier: Apache-2.0
"""What engines and drivers know from earlier starts: the state of what learns as plain numbers, and its file."""

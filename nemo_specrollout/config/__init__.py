# SPDX-License-Identifier: Apache-2.0
"""What a user may ask for, without torch."""

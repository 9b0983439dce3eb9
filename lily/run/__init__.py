# SPDX-License-Identifier: Apache-2.0
"""What runs plans: how long a context fits (budget.py), chunks of a prompt, recorded lists, tokens as they come."""

# SPDX-License-Identifier: Apache-2.0
"""reshard inside frameworks: one module for each framework, which imports it."""

"""Schedules: what runs when. Integers, without torch."""

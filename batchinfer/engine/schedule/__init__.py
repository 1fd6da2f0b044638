"""What runs when: integers, without torch."""

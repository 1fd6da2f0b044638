"""The completion store: answers by what decides them."""

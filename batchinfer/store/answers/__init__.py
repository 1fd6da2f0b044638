"""The completion store: answers by work key."""

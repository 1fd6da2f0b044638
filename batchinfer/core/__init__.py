"""What every other room speaks of: errors, requests, wording, the version. Imports numpy only."""

"""The one decoder that runs every model of ours."""

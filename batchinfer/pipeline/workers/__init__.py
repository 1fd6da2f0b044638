"""The engines' processes: started, fed, replaced."""

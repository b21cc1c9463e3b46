"""What a run will take, known before it starts: memory, time, and the layouts that would do."""

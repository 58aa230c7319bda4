"""Programs that run in the environments of other systems; they share no code with this one."""

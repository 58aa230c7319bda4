"""The workshop, which nothing that serves needs: training, replay and measurements."""

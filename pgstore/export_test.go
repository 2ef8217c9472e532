package pgstore

// Queued is how many transactions wait for their turn before they begin.
func (s *Store) Queued() int { return s.runner.turns.Waiting() }

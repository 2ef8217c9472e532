package decide

import (
	"slices"

	"github.com/pgratelimit/ratelimit/internal/bucket"
)

// Of is the definitions that bind every key of a name.
func (s *Definitions) Of(name string) []bucket.Definition {
	s.mu.RLock()
	defer s.mu.RUnlock()
	if f := s.byName[name]; f != nil {
		return slices.Clone(f.all)
	}
	return nil
}

// Note remembers the definition of a call.
func (s *Definitions) Note(d bucket.Definition) error { return s.note(&d, "", false) }

package table

import (
	"slices"
	"sync"
	"time"
)

// Lately remembers rows by their locks, each for a time after its last Note. The zero value
// remembers none. It is safe for concurrent use.
type Lately struct {
	mu    sync.Mutex
	until map[int64]time.Time
}

const (
	mostLately = 1024 // the most rows that are remembered; a further one is noted only if one of a few random rows is over
	examined   = 8    // how many random rows those are: looking at all would hold up the callers of all rows
)

// Note remembers the row of a lock for a time.
func (l *Lately) Note(lock int64, lasts time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if len(l.until) >= mostLately {
		l.forgetSome(now)
	}
	if l.until == nil {
		l.until = make(map[int64]time.Time)
	}
	if _, known := l.until[lock]; known || len(l.until) < mostLately {
		l.until[lock] = now.Add(lasts)
	}
}

func (l *Lately) forgetSome(now time.Time) {
	left := examined
	for lock, until := range l.until {
		if until.Before(now) {
			delete(l.until, lock)
		}
		if left--; left == 0 {
			return
		}
	}
}

// Among returns the locks whose rows are remembered, in ascending order. All transactions take
// locks in that order.
func (l *Lately) Among(locks func() []int64) (among []int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.until) == 0 {
		return nil
	}
	now := time.Now()
	for _, lock := range locks() {
		if until, ok := l.until[lock]; ok && !until.Before(now) {
			among = append(among, lock)
		}
	}
	slices.Sort(among)
	return slices.Compact(among)
}

// Has reports whether the row of a lock is remembered.
func (l *Lately) Has(lock int64) bool {
	return len(l.Among(func() []int64 { return []int64{lock} })) > 0
}

package refusals

import (
	"time"
)

// count is the refusals of one key, at the database's instants.
type count struct {
	times, uncertain int64
	last, retryAt    time.Time
}

func (c *count) add(more count) {
	c.times += more.times
	c.uncertain += more.uncertain
	if !more.last.Before(c.last) {
		c.last, c.retryAt = more.last, more.retryAt
	}
}

// limit counts the refusals of one limit, for at most most of its keys.
type limit map[string]*count

// add counts refusals of a key. Where all places are taken, the key with the fewest refusals gives
// up its place.
func (l limit) add(key string, more count, most int) {
	if c := l[key]; c != nil {
		c.add(more)
		return
	}
	c := &count{}
	if len(l) >= most {
		least := l.least()
		c.times, c.uncertain = l[least].times, l[least].times
		delete(l, least)
	}
	c.add(more)
	l[key] = c
}

func (l limit) least() (least string) {
	var lowest *count
	for key, c := range l {
		if lowest == nil || c.times < lowest.times {
			least, lowest = key, c
		}
	}
	return least
}

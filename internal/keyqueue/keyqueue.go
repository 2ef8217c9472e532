// Package keyqueue lets goroutines in by key, first come, first served. Each key
// has a number of places.
package keyqueue

import (
	"container/list"
	"context"
	"slices"
	"sync"
)

// Queue is the queues of all keys. The zero value is ready to use. A key that is neither held
// nor waited for takes no memory. It is safe for concurrent use.
//
// A caller that holds places of several keys must enter them in an order that is the same for
// all callers, or two can wait for each other.
type Queue[K comparable] struct {
	mu   sync.Mutex
	keys map[K]*line
}

// line is the queue of one key. While anybody waits no place is free.
type line struct {
	places  int
	free    []int     // ascending
	waiting list.List // of *waiter, in order of arrival
}

type waiter struct {
	element *list.Element // in the line's waiting, nil once it has a place
	place   int
	ready   chan struct{} // closed once it has a place
}

// Enter returns one of the key's places, from 0 to places-1, when one is free
// and it is the caller's turn. The caller must give it back with [Queue.Leave].
// If ctx is over first the error is that of ctx, and nothing is held.
//
// The number of places must be the same, one or more, for all callers that use the key at a
// time. Of the places that are free at the call, choose picks one, or if it is nil the first is
// taken. It must be quick, and must not use the queue nor keep or change the slice. A caller
// that has to wait gets the place that becomes free.
func (q *Queue[K]) Enter(ctx context.Context, key K, places int, choose func(free []int) int) (place int, err error) {
	if places < 1 {
		panic("keyqueue: a key must have a place")
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	place, w := q.join(key, places, choose)
	if w == nil {
		return place, nil
	}
	select {
	case <-w.ready:
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		q.giveUp(key, w)
		return 0, err
	}
	return w.place, nil
}

// Leave gives a place back, and hands it to the caller that has waited longest. It panics if
// the place is not held.
func (q *Queue[K]) Leave(key K, place int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.keys[key]
	if l == nil || slices.Contains(l.free, place) {
		panic("keyqueue: Leave of a place that is not held")
	}
	q.pass(key, l, place)
}

// Waiting returns how many wait, for all keys together.
func (q *Queue[K]) Waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for _, l := range q.keys {
		n += l.waiting.Len()
	}
	return n
}

// join returns a place, or if none is free a waiter that is last in line.
func (q *Queue[K]) join(key K, places int, choose func([]int) int) (int, *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.keys[key]
	if l == nil {
		l = newLine(places)
	}
	if len(l.free) == 0 {
		w := &waiter{ready: make(chan struct{})}
		w.element = l.waiting.PushBack(w)
		return 0, w
	}
	place := l.take(choose)
	if q.keys == nil {
		q.keys = make(map[K]*line)
	}
	q.keys[key] = l
	return place, nil
}

// giveUp leaves the line. If its turn came in the meantime it passes it on.
func (q *Queue[K]) giveUp(key K, w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.keys[key]
	if w.element == nil {
		q.pass(key, l, w.place)
		return
	}
	l.waiting.Remove(w.element)
}

// pass hands a place to the caller that has waited longest, and forgets a key without holders
// and waiters.
func (q *Queue[K]) pass(key K, l *line, place int) {
	if first := l.waiting.Front(); first != nil {
		w := l.waiting.Remove(first).(*waiter)
		w.element, w.place = nil, place
		close(w.ready)
		return
	}
	l.put(place)
	if len(l.free) == l.places {
		delete(q.keys, key)
	}
}

func newLine(places int) *line {
	l := &line{places: places, free: make([]int, places)}
	for i := range l.free {
		l.free[i] = i
	}
	return l
}

// take takes one of the free places, of which there must be some.
func (l *line) take(choose func([]int) int) int {
	place := l.free[0]
	if choose != nil {
		place = choose(l.free)
	}
	i, ok := slices.BinarySearch(l.free, place)
	if !ok {
		panic("keyqueue: a place was chosen that is not free")
	}
	l.free = slices.Delete(l.free, i, i+1)
	return place
}

func (l *line) put(place int) {
	i, _ := slices.BinarySearch(l.free, place)
	l.free = slices.Insert(l.free, i, place)
}

// Package keyqueue admits goroutines by key, first come, first served. Each key has a number of
// tickets.
package keyqueue

import (
	"context"
	"slices"
	"sync"
)

// Queue holds the queues of all keys. Its zero value is ready to use, and it is safe for concurrent
// use. A key without holders and waiters takes no memory.
//
// A caller that holds tickets of several keys must enter the keys in one order for all callers, or
// two can wait for each other.
type Queue[K comparable] struct {
	mu   sync.Mutex
	keys map[K]*keyQueue
}

// keyQueue is the queue of one key. While callers wait, no ticket is free.
type keyQueue struct {
	tickets int
	free    []int     // ascending
	waiting []*waiter // in order of arrival
}

type waiter struct {
	ticket int
	ready  chan struct{} // closed once it has a ticket
}

// Enter waits for the caller's turn and returns a free ticket, from 0 to tickets-1. Return it with
// [Queue.Leave]. If ctx ends first, Enter returns its error and holds nothing.
//
// All callers of a key must pass the same number of tickets, one or more. If several are free at
// the call, choose picks one; without choose it is the first. choose must be quick, must not use
// the queue, and must not keep or change the slice. A caller that has to wait gets the ticket that
// becomes free.
func (q *Queue[K]) Enter(ctx context.Context, key K, tickets int, choose func(free []int) int) (ticket int, err error) {
	if tickets < 1 {
		panic("keyqueue: a key must have a ticket")
	}
	if err := ctx.Err(); err != nil {
		return 0, err
	}
	ticket, w := q.join(key, tickets, choose)
	if w == nil {
		return ticket, nil
	}
	select {
	case <-w.ready:
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		q.giveUp(key, w)
		return 0, err
	}
	return w.ticket, nil
}

// Leave returns a ticket and hands it to the caller that has waited longest. It panics if the
// ticket is not held.
func (q *Queue[K]) Leave(key K, ticket int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.keys[key]
	if l == nil || slices.Contains(l.free, ticket) {
		panic("keyqueue: Leave of a ticket that is not held")
	}
	q.pass(key, l, ticket)
}

// Waiting returns the number of waiting callers of all keys.
func (q *Queue[K]) Waiting() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	n := 0
	for _, l := range q.keys {
		n += len(l.waiting)
	}
	return n
}

// join returns a free ticket, or a waiter at the end of the line.
func (q *Queue[K]) join(key K, tickets int, choose func([]int) int) (int, *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.keys[key]
	if l == nil {
		l = newLine(tickets)
	}
	if len(l.free) == 0 {
		w := &waiter{ready: make(chan struct{})}
		l.waiting = append(l.waiting, w)
		return 0, w
	}
	ticket := l.take(choose)
	if q.keys == nil {
		q.keys = make(map[K]*keyQueue)
	}
	q.keys[key] = l
	return ticket, nil
}

// giveUp leaves the line, and passes on a ticket that arrived meanwhile.
func (q *Queue[K]) giveUp(key K, w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	l := q.keys[key]
	if i := slices.Index(l.waiting, w); i >= 0 {
		l.waiting = slices.Delete(l.waiting, i, i+1)
		return
	}
	q.pass(key, l, w.ticket)
}

// pass hands a ticket to the caller that has waited longest, and deletes a key without holders and
// waiters.
func (q *Queue[K]) pass(key K, l *keyQueue, ticket int) {
	if len(l.waiting) > 0 {
		w := l.waiting[0]
		l.waiting = slices.Delete(l.waiting, 0, 1)
		w.ticket = ticket
		close(w.ready)
		return
	}
	if len(l.free) == l.tickets-1 {
		delete(q.keys, key)
		return
	}
	i, _ := slices.BinarySearch(l.free, ticket)
	l.free = slices.Insert(l.free, i, ticket)
}

func newLine(tickets int) *keyQueue {
	l := &keyQueue{tickets: tickets, free: make([]int, tickets)}
	for i := range l.free {
		l.free[i] = i
	}
	return l
}

// take removes and returns one of the free tickets; there must be one.
func (l *keyQueue) take(choose func([]int) int) int {
	ticket := l.free[0]
	if choose != nil {
		ticket = choose(l.free)
	}
	i, ok := slices.BinarySearch(l.free, ticket)
	if !ok {
		panic("keyqueue: a ticket was chosen that is not free")
	}
	l.free = slices.Delete(l.free, i, i+1)
	return ticket
}

package conn

import (
	"context"
	"math"
	"sync"
	"sync/atomic"
)

// Work counts the calls under way, for which Close waits. Each call writes one number twice; a lock and
// a sync.WaitGroup would write shared memory four times.
type Work struct {
	underWay       atomic.Int64 // the calls under way; less by closing once Close was called
	closing, ended sync.Once
	over           chan struct{} // closed when nothing is under way after Close

	Opened context.Context // ends when Close is called
	shut   context.CancelFunc
}

const closing = math.MinInt64 / 2

func (w *Work) open() {
	w.over = make(chan struct{})
	w.Opened, w.shut = context.WithCancel(context.Background())
}

// Begin counts a call until End. After Close it returns ErrClosed, and the caller must not call End.
func (w *Work) Begin(ctx context.Context) error {
	if w.underWay.Add(1) > 0 || ctx.Value(w) != nil {
		return nil
	}
	w.End()
	return ErrClosed
}

// BeginSpan begins work of several calls, such as a wait. Its context ends when the Store is closed. The
// calls that use the context begin even then.
func (w *Work) BeginSpan(ctx context.Context) (_ context.Context, end func(), err error) {
	if err := w.Begin(ctx); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(w.Part(ctx))
	stop := context.AfterFunc(w.Opened, cancel)
	return ctx, func() { stop(); cancel(); w.End() }, nil
}

// Part returns a context whose calls begin even when the Store is closed.
func (w *Work) Part(ctx context.Context) context.Context { return context.WithValue(ctx, w, true) }

// End ends a call that has begun.
func (w *Work) End() {
	if w.underWay.Add(-1) == closing {
		w.ended.Do(func() { close(w.over) })
	}
}

// Spawn starts a goroutine that counts as a call. The caller has begun one.
func (w *Work) Spawn(f func()) {
	w.underWay.Add(1)
	go func() {
		defer w.End()
		f()
	}()
}

// UnderWay returns the number of calls under way.
func (w *Work) UnderWay() int64 {
	n := w.underWay.Load()
	if n < 0 {
		n -= closing
	}
	return n
}

// Close lets no more calls begin, and returns when none is under way.
func (w *Work) Close() {
	w.closing.Do(func() {
		w.shut()
		w.underWay.Add(closing + 1)
		w.End()
	})
	<-w.over
}

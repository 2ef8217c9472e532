CREATE TABLE messages (id bigserial PRIMARY KEY, sender text NOT NULL);
